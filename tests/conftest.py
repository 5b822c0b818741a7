"""Settings of all tests: hypothesis profiles, and which package is under test."""

from pathlib import Path

from hypothesis import settings

import npinfer

# Slow machines are no failure, and a found failure should stay found.
settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("brief", deadline=None, max_examples=10)
settings.load_profile("default")


def pytest_report_header():
    return f"npinfer from {Path(npinfer.__file__).parent}"
