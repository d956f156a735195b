"""The cutoff layer by hand-made times, and the profile file."""

import pytest

from spmoe_lite.cutoff import (
    Drift,
    Profile,
    cutoff_layer,
    expected_copies,
    load_profile,
    save_profile,
)


def layers(profile, **how):
    defaults = {"num_layers": 32, "num_draft_tokens": 4, "copies_per_layer": 1, "free_slots": 99}
    return cutoff_layer(profile, **(defaults | how))


def test_the_paper_rule_when_the_target_takes_no_time():
    # T_draft = 4 x 10 ms, one copy 8 ms: L = 5 (SP-MoE reports 3 to 5 as best on such a machine)
    assert layers(Profile(8, 10, 0)) == 5
    assert layers(Profile(8, 10, 0), copies_per_layer=2) == 2
    assert layers(Profile(50, 10, 0)) == 0


def test_deadlines_reach_into_the_verify_pass():
    assert layers(Profile(8, 10, 4)) == 9  # 8 (l + 1) <= 40 + 4 l  while l <= 8
    assert layers(Profile(8, 10, 8)) == 32


def test_free_slots_bound_it():
    assert layers(Profile(1, 100, 1), free_slots=6, copies_per_layer=2) == 3
    assert layers(Profile(1, 100, 1), free_slots=0) == 0


def test_nothing_to_copy_or_nothing_drafted_is_no_prefetch():
    assert layers(Profile(1, 100, 1), copies_per_layer=0) == 0
    assert layers(Profile(1, 100, 1), num_draft_tokens=0) == 0


def test_copies_are_the_absent_part_of_the_union():
    assert expected_copies(8, 2, 1, 0.0) == pytest.approx(2)
    assert expected_copies(8, 2, 4, 0.0) == pytest.approx(5.47, abs=0.01)  # PAPERS: U(4) = 5.47
    assert expected_copies(8, 2, 4, 0.5) == pytest.approx(2.73, abs=0.01)
    assert expected_copies(8, 2, 4, 1.0) == 0


def test_the_profile_follows_the_machine():
    drift = Drift(Profile(10, 10, 10), weight=0.5)
    drift.observe(draft_token_ms=20)
    assert drift.profile == Profile(10, 15, 10)


def test_a_profile_survives_the_disk_and_a_bad_file_is_none(tmp_path):
    path = tmp_path / "deep" / "p.json"
    save_profile(path, Profile(1.5, 2.5, 3.5))
    assert load_profile(path) == Profile(1.5, 2.5, 3.5)
    for text in ["", "{}", "[1]", '{"expert_copy_ms": "x"}', '{"expert_copy_ms": NaN}']:
        path.write_text(text, encoding="utf-8")
        assert load_profile(path) is None
    path.write_text('{"expert_copy_ms": -1, "draft_token_ms": 1, "target_layer_ms": 1}')
    assert load_profile(path) is None
    assert load_profile(tmp_path / "absent.json") is None
