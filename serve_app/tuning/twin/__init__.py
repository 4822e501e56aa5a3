"""The digital twin: recorded traffic played on simulated engines under other settings.

`traffic` keeps recent requests and draws windows from them. `digital_twin` plays a window, `processes` plays
several at once. `engine_fit` fits the step times of the engines to those of the real ones.
"""
