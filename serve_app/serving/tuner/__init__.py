"""The tuner process of a model: it learns length queues, and searches for better settings of the scheduler.

Read `actor` (the loop over one scheduler), then `parameter_tuner` (settings, beside the loop of
`serve_app.tuning.online`), and `deployment` (the tuner in Ray Serve).
"""
