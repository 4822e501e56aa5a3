"""Settings file of an application: from YAML to the settings that each component receives.

Read `application` for the classes, as written and complete, and for how a file becomes settings. `checking`
validates a file before Ray starts. The settings of a component are defined beside its code, with
`serve_app.core.settings_base`.
"""
