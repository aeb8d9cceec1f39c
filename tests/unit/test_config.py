"""Settings are checked in one place, frozen, and fingerprinted by their values."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import hash_config
from virnucpro.config import RunLimits, fingerprint
from virnucpro.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("token_budget", 0),
        ("max_residues", 1),
        ("sequences_per_part", 1),
    ],
)
def test_a_number_out_of_range_is_refused_by_name_and_value(name, least):
    for value in (least - 1, -5):
        with pytest.raises(ConfigurationError, match=f"{name} is {value}: it must be at least {least}"):
            hash_config(**{name: value})
    assert getattr(hash_config(**{name: least}), name) == least


def test_settings_cannot_be_changed_only_replaced():
    config = hash_config()
    with pytest.raises(FrozenInstanceError):
        config.token_budget = 1
    with pytest.raises(ConfigurationError):
        replace(config, token_budget=-1)


def test_settings_go_through_a_pipe_unchanged():
    config = hash_config(precision="bf16", max_residues=7)
    assert pickle.loads(pickle.dumps(config)) == config


def test_settings_that_decide_rows_are_ready_for_json_and_name_no_path():
    settings = hash_config(weights_path="/home/somebody/model.pt").result_settings()
    assert json.loads(json.dumps(settings)) == settings
    assert "somebody" not in json.dumps(settings)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner, max_size=4)
)


@given(st.dictionaries(st.text(), plain, max_size=6), st.randoms())
def test_a_fingerprint_does_not_depend_on_the_order_of_keys(values, chooser):
    keys = list(values)
    chooser.shuffle(keys)
    assert fingerprint({key: values[key] for key in keys}) == fingerprint(values)


@given(plain, plain)
def test_a_fingerprint_is_another_one_for_other_values(first, second):
    same_json = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (fingerprint(first) == fingerprint(second)) is same_json


def test_limits_leave_time_to_start_and_are_in_order():
    limits = RunLimits()
    assert limits.attempts >= 1
    assert 0 < limits.stop_grace_s < limits.heartbeat_timeout_s < limits.progress_timeout_s < limits.startup_timeout_s
