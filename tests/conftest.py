"""One profile of hypothesis for all tests."""

import hypothesis

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
