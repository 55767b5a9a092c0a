"""The normal mode of device tensors by kernels with ranks on two hosts: its suite of one host, with
hosts of unequal size. Results are in the suites that run on layout `device-kernels-hosts`."""

from __future__ import annotations

import hosts
import peer_ranks
import pytest
import test_ep_token_kernels
from normal_crew import AMPLE, LITTLE

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))


@pytest.fixture(params=[(3, 1), (1, 3), (2, 2)], ids=["3+1", "1+3", "2+2"], autouse=True)
def apart(request, two_hosts, monkeypatch):
    """So many ranks on each of two hosts."""
    monkeypatch.setattr(peer_ranks, "places", lambda size: two_hosts().places(request.param))


@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
def test_each_call_is_one_kernel(num_bytes):
    test_ep_token_kernels.test_each_call_is_one_kernel(num_bytes)


def test_no_host_waits_for_another_rank():
    test_ep_token_kernels.test_no_host_waits_for_another_rank()


@pytest.mark.parametrize("num_bytes", [AMPLE, LITTLE])
@pytest.mark.parametrize("where", ["counts", "rows", "combine"])
@pytest.mark.parametrize("victim", [0, 3])
def test_survivors_go_on(victim, where, num_bytes):
    test_ep_token_kernels.test_survivors_go_on(victim, where, num_bytes)


def test_a_buffer_that_is_made_after_a_loss():
    test_ep_token_kernels.test_a_buffer_that_is_made_after_a_loss(0)


@pytest.mark.parametrize("once", [False, True])
def test_expanded_rows_after_a_loss(once):
    test_ep_token_kernels.test_expanded_rows_after_a_loss(3, once)


def test_results_of_a_dropped_buffer():
    test_ep_token_kernels.test_results_of_a_dropped_buffer()


def test_too_few_places():
    test_ep_token_kernels.test_too_few_places()


@pytest.mark.parametrize("what", ["handle", "places"])
def test_other_calls_of_a_rank(what):
    test_ep_token_kernels.test_other_calls_of_a_rank(what)


def test_errors_of_one_rank():
    test_ep_token_kernels.test_errors_of_one_rank()


def test_a_first_call_that_is_wrong():
    test_ep_token_kernels.test_a_first_call_that_is_wrong()
