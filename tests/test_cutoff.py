"""The cutoff layer by hand-made times, and the profile file."""

import json
import logging
import math
import os
from pathlib import Path

import pytest

from spmoe_lite.cutoff import (
    Drift,
    Profile,
    copies_queued,
    cutoff_layer,
    expected_copies,
    load_profile,
    save_profile,
)
from spmoe_lite.errors import SpmoeError
from spmoe_lite.speed import acceptance

OLD = {"expert_copy_ms": 1.0, "draft_token_ms": 2.0, "target_layer_ms": 3.0}


def layers(profile, **how):
    defaults = {"num_layers": 32, "num_draft_tokens": 4, "copies_per_layer": 1, "free_slots": 99}
    return cutoff_layer(profile, **(defaults | how))


@pytest.mark.parametrize("layer_ms", [0, 8])  # what the target takes gives no time for copies
def test_the_paper_rule(layer_ms):
    # T_draft = 4 x 10 ms, one copy 8 ms: L = 5 (SP-MoE reports 3 to 5 as best on such a machine)
    assert layers(Profile(8, 10, layer_ms)) == 5
    assert layers(Profile(8, 10, layer_ms), copies_per_layer=2) == 3  # one of the third layer's two
    assert layers(Profile(50, 10, layer_ms)) == 0


def test_free_slots_bound_it():
    assert layers(Profile(1, 100, 1), free_slots=6, copies_per_layer=2) == 3
    assert layers(Profile(1, 100, 1), free_slots=0) == 0


def test_nothing_to_copy_or_nothing_drafted_is_no_prefetch():
    assert layers(Profile(1, 100, 1), copies_per_layer=0) == 0
    assert layers(Profile(1, 100, 1), num_draft_tokens=0) == 0


def test_copies_keep_the_bus_busy_and_end_with_the_drafting():
    assert copies_queued(Profile(8, 10, 0), 4, 0.0) == [
        1,
        1,
        1,
        1,
    ]  # 10 / 8; 10 ms are left at last
    assert copies_queued(Profile(8, 10, 0), 4, 0.5) == [1, 1, 1, 1]  # 5 / 8, to the nearest
    assert copies_queued(Profile(8, 10, 0), 4, 0.7) == [1, 1, 1, 0]  # 3 / 8
    assert copies_queued(Profile(4, 10, 0), 4, 0.5) == [2, 2, 2, 1]
    assert copies_queued(Profile(50, 10, 0), 4, 0.25) == [1, 1, 0, 0]  # 37 / 50, 27 / 50, 17 / 50
    assert copies_queued(Profile(90, 10, 0), 4, 0.25) == [0, 0, 0, 0]
    assert copies_queued(Profile(1, 10, 0), 2, 0.5) == [10, 5]
    assert copies_queued(Profile(8, 10, 0), 1, 1.0) == [0]  # with the last layer drafting is over
    assert copies_queued(Profile(8, 10, 0), 0, 1.0) == []
    assert copies_queued(Profile(0, 10, 1), 2, 0.0) == [10**6] * 2  # copies that take no time


def test_a_copy_still_under_way_makes_room_for_the_next_one():
    """Else a copy that takes a little longer than a draft pass leaves the bus idle for most of the next."""
    assert copies_queued(Profile(9.8, 10, 0), 4, 0.25) == [1, 1, 1, 1]
    assert copies_queued(Profile(10.2, 10, 0), 4, 0.25) == [1, 2, 2, 2]  # 6.9 / 10.2 at last
    assert copies_queued(Profile(10.2, 10, 0), 4, 0.5) == [1, 2, 2, 0]  # 4.4 / 10.2: none
    assert copies_queued(Profile(6, 10, 0), 4, 0.25) == [2, 2, 2, 2]  # until 12; 20 or 26, 32; 38
    assert copies_queued(Profile(14, 10, 0), 4, 0.25) == [1, 1, 1, 1]  # until 14; 34; 7.5 / 14


@pytest.mark.parametrize(
    "copy_ms", [0.3, 0.7, 1, 1.5, 2.2, 3, 4.9, 5.1, 7, 9.9, 10.1, 13, 17, 24, 36]
)
@pytest.mark.parametrize("start", [0.0, 0.25, 0.9])
def test_what_is_queued_ends_with_the_drafting_and_the_bus_hardly_idles(copy_ms, start):
    """By a bus with a clock: half a copy late at most, and less than a copy idle in each draft pass."""
    for drafts in range(1, 9):
        queued = copies_queued(Profile(copy_ms, 10, 0), drafts, start)
        end, busy_until, idle = (drafts - start) * 10, 0.0, 0.0
        for i, most in enumerate(queued):
            now = i * 10.0
            under_way = math.ceil(round(max(0.0, busy_until - now) / copy_ms, 6))
            if most > under_way:
                idle += max(0.0, now - busy_until)
                busy_until = max(busy_until, now) + (most - under_way) * copy_ms
        assert busy_until <= end + copy_ms / 2 + 1e-6
        if busy_until < end:
            idle += end - busy_until
        assert idle <= drafts * min(copy_ms, 10.0) / 2 + 1e-6 or busy_until == 0.0


def test_a_bus_that_is_free_to_the_last_bit_gets_a_copy():
    """3 * 2.3 is 6.8999999999999995: the copy of 6.9 has ended there."""
    assert copies_queued(Profile(6.9, 2.3, 0), 8, 0.0) == [1, 1, 1, 1, 1, 1, 1, 0]
    assert copies_queued(Profile(3, 1, 0), 8, 0.0) == [1, 1, 1, 1, 1, 1, 1, 0]


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


def test_what_is_at_the_bounds_is_read(tmp_path):
    path = tmp_path / "p.json"
    for profile in (
        Profile(0, 0.0, 0.0, 0.0, 0, acceptance=0.0, miss_ratio=0),
        Profile(1, 1, 1, acceptance=acceptance(0.0, 4)),  # nothing accepted: by bisection, not 0
        Profile(1e-9, 1e9, 1, 1e-9, 1000, 1e-6, 1e6, 1, 1e5, 1.0),
    ):
        save_profile(path, profile)
        assert load_profile(path) == profile


DAMAGED = [
    "",
    "null",
    "{}",
    "[" * 100_000,
    '{"expert_copy_ms":' * 100_000,
    " " * 70_000 + json.dumps(OLD),
    json.dumps(OLD)[:-1] + ', "expert_copy_ms": 1.0}',
    json.dumps(OLD | {"acceptance": float("nan")}),
    json.dumps(OLD | {"other; field": 1}),
    json.dumps(OLD)[:-1] + ', "copy_gbps": 1e999}',
    *(
        json.dumps(OLD | {name: value})
        for names, values in {
            "expert_copy_ms draft_token_ms target_layer_ms": [None],
            "expert_copy_ms draft_token_ms target_layer_ms plain_layer_ms": [
                5e-324,
                1e308,
                -1,
                "1",
            ],
            "copy_gbps read_gbps disk_gbps": [0, 1e-7, 1e7, 5e-324, True],
            "acceptance": [1e300, 5, -0.1, "a; b", True, []],
            "miss_ratio": [5e-324, 1e308, -1, False, {}],
            "verify_rows": [1001, -1, 2.0, True, 10**400],
            "target_layer_ms": [10**400, -(10**400), True],
        }.items()
        for name in names.split()
        for value in values
    ),
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[-60:])
def test_a_damaged_profile_is_none_and_said_once(text, tmp_path, caplog):
    path = tmp_path / "p.json"
    path.write_text(text, encoding="utf-8")
    with caplog.at_level(logging.WARNING, "spmoe_lite"):
        assert load_profile(path) is None and load_profile(path) is None
    (said,) = caplog.messages
    assert said.startswith(f"{path} is not used: it ") and said.endswith("; run profile again")
    assert "\n" not in said and len(said) < len(str(path)) + 200
    save_profile(path, Profile(1.5, 2.5, 3.5))  # is no obstacle
    assert load_profile(path) == Profile(1.5, 2.5, 3.5)


def put_folder(path: Path):
    path.mkdir()


def put_pipe(path: Path):
    os.mkfifo(path)


def put_link_out(path: Path):
    outside = path.parent.parent / "outside.json"
    outside.write_text(json.dumps(OLD))
    path.symlink_to(outside)


def put_dangling_link(path: Path):
    path.symlink_to(path.parent / "nowhere" / "p.json")


def put_loop(path: Path):
    path.symlink_to(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="links and pipes of POSIX")
@pytest.mark.parametrize("put", [put_folder, put_pipe, put_link_out, put_dangling_link, put_loop])
def test_what_is_no_file_is_neither_read_nor_written(put, tmp_path, caplog):
    path = tmp_path / "profiles" / "p.json"
    path.parent.mkdir()
    put(path)
    with caplog.at_level(logging.WARNING, "spmoe_lite"):
        assert load_profile(path) is None and load_profile(path) is None
    assert len(caplog.messages) == (put is not put_dangling_link)  # that is no file
    with pytest.raises(SpmoeError, match="cannot write") as refused:
        save_profile(path, Profile(1, 1, 1))
    assert str(path) in str(refused.value)
    assert os.listdir(path.parent) == ["p.json"]


def test_a_home_that_takes_no_folder_is_named(tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file")
    path = tmp_path / "profiles" / "p.json"
    assert load_profile(path) is None and str(path) in caplog.text
    with pytest.raises(SpmoeError, match="cannot create") as refused:
        save_profile(path, Profile(1, 1, 1))
    assert str(path.parent) in str(refused.value)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    save_profile(path, Profile(1, 1, 1))

    def full(self, data):
        with open(self, "wb") as file:
            file.write(data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SpmoeError, match="disk full") as refused:
        save_profile(path, Profile(2, 2, 2))
    assert str(path) in str(refused.value) and refused.value.exit_code == 4
    assert load_profile(path) == Profile(1, 1, 1) and os.listdir(tmp_path) == ["p.json"]
