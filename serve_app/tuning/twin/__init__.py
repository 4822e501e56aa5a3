"""The digital twin: recorded traffic played on simulated engines under other settings.

`traffic` keeps what arrived and draws windows from it, `digital_twin` plays one window, `processes` plays
several at once, `engine_pace` corrects the profile by what the real engines took.
"""
