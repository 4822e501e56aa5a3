"""The tuner process of a model: learns length queues, and searches for better settings of the scheduler.

Reading order: `actor` (the loop over one scheduler), `parameter_tuner` (settings, around the loop in
`serve_app.tuning.parameter_loop`), `deployment` (the tuner in Ray Serve).
"""
