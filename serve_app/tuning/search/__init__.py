"""The search for better settings.

`tunable` and `search_space` say what may change, `optimiser` proposes (TPE or random), `study` spends
windows on candidates and decides, `study_run` plays a study within a time budget, `recommendation` words
the result.
"""
