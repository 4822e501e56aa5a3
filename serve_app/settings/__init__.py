"""The settings file of an application: from YAML to what every component receives.

Read `application` for the classes, as written and complete, then `loading` for the way from a file to them. A
component's own settings stand beside its code, made and read by `serve_app.core.settings_base`.
"""
