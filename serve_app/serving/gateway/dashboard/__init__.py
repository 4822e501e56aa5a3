"""The page for admins at `/dashboard`: what all schedulers do now, live, and a form to send a request.

Read `pages` first, which serves the files of `static` and says what browsers may do with them. `frames` draws
up one picture a second for all who watch, and `watching` sends it to one of them.
"""

from serve_app.serving.gateway.dashboard.pages import DASHBOARD_PATH, EVENTS_PATH, Dashboard

__all__ = ["DASHBOARD_PATH", "EVENTS_PATH", "Dashboard"]
