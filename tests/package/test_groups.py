"""The tests of a group run in one process: pytest-xdist says so by their names, and is silent where it cannot."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process")
def test_the_tests_of_a_file_are_a_group(request):
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@test_groups")
