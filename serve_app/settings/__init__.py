"""The settings file: `application` composes every component's settings and turns YAML into them.

`errors` words what is wrong. Each component's own settings stand beside its code.
"""
