"""Every shipped tile, compiled for its card on a machine without one (`crosscompile.py`)."""

import json

import pytest

SHARED_KB = {"7.5": 64, "8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "12.0": 99}
pytestmark = pytest.mark.timeout(900)  # its compilers leave the processor to all others
PARKED = 96  # bytes: values that ptxas puts aside around a loop, not in it, to fit more programs


@pytest.fixture(scope="module")
def compiled(cross_compiling) -> list[dict]:
    """One description per kernel and card."""
    if not cross_compiling:
        pytest.skip("Triton is declared for Linux only")
    assert [process.wait() for process, _ in cross_compiling] == [0, 0]
    return [
        json.loads(line) for _, path in cross_compiling for line in path.read_text().splitlines()
    ]


def test_every_card_was_compiled_for(compiled):
    assert {entry["capability"] for entry in compiled} == set(SHARED_KB)
    assert {entry["kernel"] for entry in compiled} >= {
        "_expert_gemm_kernel",
        "_linear_kernel",
        "_attention_kernel",
        "_merge_kernel",
        "_gate_kernel",
        "_route_kernel",
        "_stage_kernel",
    }


def test_weights_are_loaded_sixteen_bytes_at_a_time(compiled):
    """An expert's address is a number until the cast: without the hint every load is 2 bytes."""
    for entry in compiled:
        if entry["kernel"] in ("_expert_gemm_kernel", "_linear_kernel"):
            assert not {"b16", "b8"} & set(entry["loads"]), entry
            coded = entry["constants"]["BITS"] != "0"
            if entry["capability"] == "7.5":
                assert "v4.b32" in entry["loads"], entry
            elif coded:  # a scale is 4 bytes a row; at a group of 32 x comes in halves
                assert set(entry["async_bytes"]) in ({4, 16}, {4, 8, 16}), entry
            else:
                assert entry["async_bytes"] == [16], entry


def test_keys_and_values_are_loaded_sixteen_bytes_at_a_time(compiled):
    """Of int8 rows a thread may have eight bytes; the two scales of a key are a word."""
    for entry in compiled:
        if entry["kernel"] == "_attention_kernel":
            assert not {"b16", "b8"} & set(entry["loads"]), entry
            if entry["capability"] != "7.5":
                coded = entry["constants"].get("kv_scale_ptr") != "None"
                assert set(entry["async_bytes"]) in ([{4, 16}, {4, 8, 16}] if coded else [{16}])


def test_the_router_is_loaded_sixteen_bytes_at_a_time(compiled):
    for entry in compiled:
        if entry["kernel"] == "_gate_kernel":
            assert "v4.b32" in entry["loads"] and not {"b16", "b8"} & set(entry["loads"]), entry
            assert entry["stack"] == 0, entry


def test_experts_are_copied_sixteen_bytes_at_a_time(compiled):
    """By loads of 4 bytes it takes sixteen programs to fill the bus, and the draft lacks their processors."""
    fetching = [entry for entry in compiled if entry["kernel"] == "_fetch_kernel"]
    assert len(fetching) == 2
    for entry in fetching:
        assert "v4.b32" in entry["loads"], entry


def test_whether_drafting_is_over_is_asked_by_one_thread(compiled):
    """Warps that ask for themselves get different answers: an expert would count as copied without the share of some."""
    fetching = [entry for entry in compiled if entry["kernel"] == "_fetch_kernel"]
    assert len(fetching) == 2
    for entry in fetching:
        (ask,) = entry["asks"]
        assert ask.startswith("@%p") and " atom." in ask, entry


def test_what_has_not_come_is_counted_by_all_warps_together(compiled):
    """`fetch` may be at it: warps that each count for themselves, as they do up to 32 numbers, would part ways."""
    staging = [entry for entry in compiled if entry["kernel"] == "_stage_kernel"]
    assert len(staging) == 4
    for entry in staging:
        counted, warps = int(entry["constants"]["BLOCK_S"]), entry["options"]["num_warps"]
        assert warps == 4 and counted >= 32 * warps, entry


def test_shared_memory_fits_and_registers_do_not_spill(compiled):
    for entry in compiled:
        assert entry["shared"] <= SHARED_KB[entry["capability"]] * 1024, entry
        assert entry["stack"] <= PARKED, entry


def test_no_wgmma_waits_for_the_one_before(compiled):
    """ptxas makes them wait, with a note only (C7515), where it sees a way around the loop."""
    assert not [entry for entry in compiled if entry["serialized"]]


def test_one_kind_of_matrix_instruction_per_card(compiled):
    """A row would change its bits with the number of rows if tiles took different instructions."""
    kinds = {"7.5": [], "9.0": ["wgmma.mma_async"]}
    for entry in compiled:
        if entry["kernel"] in ("_expert_gemm_kernel", "_linear_kernel", "_attention_kernel"):
            assert entry["matrix"] == kinds.get(entry["capability"], ["mma.sync"]), entry
