"""The search for better values: what may change, what to try next, and whether it is better.

`tunable` and `search_space` say what may change (`settings_path` reads and writes it), `optimiser` proposes
(TPE or random). `study` spends windows on candidates and decides, by the rewards on its `scoreboard` and the
paired `comparison`. `study_run` plays a study within a time budget, and `study_report` words the result.

The package does not know the twin: it declares what plays windows as a protocol (`study_run.WindowPlayer`).
"""
