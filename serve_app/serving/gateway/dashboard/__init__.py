"""The admin dashboard at `/dashboard`: a live view of all schedulers, and a form to send a request.

`pages` serves the files of `static` with security headers, and renders a frame per second for all watchers.
"""

from serve_app.serving.gateway.dashboard.pages import DASHBOARD_PATH, EVENTS_PATH, Dashboard

__all__ = ["DASHBOARD_PATH", "EVENTS_PATH", "Dashboard"]
