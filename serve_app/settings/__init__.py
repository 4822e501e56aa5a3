"""The settings file of an application: from YAML to what every component receives.

Read `application` for the classes, as written and complete, `loading` for the way from a file to them, and
`resolve` for what follows from the models. `tree` finds the place of every key and `errors` words what is
wrong with a value. A component's own settings stand beside its code, made by `serve_app.settings_base`.
"""
