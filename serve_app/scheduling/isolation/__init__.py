"""Prefill isolation: a bound on the long prefills that run at once inside one engine.

`prefill_isolation` classifies prompts and limits long prefills in flight, `prefill_watch` learns when a
prefill has ended, and `feedback_delay` measures how late the scheduler hears of it.
"""
