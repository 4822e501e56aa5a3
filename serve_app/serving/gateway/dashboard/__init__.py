"""The page for admins at `/dashboard`: what all schedulers do now, live, and a form to send a request.

`pages` serves the files of `static`, says what browsers may do with them, and draws up one picture a second
for all who watch.
"""

from serve_app.serving.gateway.dashboard.pages import DASHBOARD_PATH, EVENTS_PATH, Dashboard

__all__ = ["DASHBOARD_PATH", "EVENTS_PATH", "Dashboard"]
