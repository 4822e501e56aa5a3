"""Prefill isolation: long prefills must not pile up inside one engine.

`prefill_isolation` classifies prompts and limits long prefills in flight, `prefill_watch` learns when a
prefill has ended, `feedback_delay` measures how late the scheduler is told, which the limits allow for.
"""
