"""The slot table: a model of it in ten lines, random histories, and the rules one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe_lite.slots import SlotTable, choose_victim
from tests.interrupt import Interrupt


def test_victim_is_the_least_recently_used_and_ties_go_to_the_lowest_id():
    used = {(0, 0): 5, (0, 1): 3, (0, 2): 3}
    assert choose_victim([(0, 0), (0, 1), (0, 2)], used) == (0, 1)
    assert choose_victim([(0, 0), (0, 3)], used) == (0, 3)  # never used goes first
    assert choose_victim([], used) is None


def fill(table, key, **how):
    placed = table.place(key, **how)
    assert placed is not None
    table.filled(key)
    return placed


def test_a_layer_evicts_only_its_own_experts():
    table = SlotTable(8, num_layers=2, num_experts=8, k=2, policy="layer-lru")
    assert not table.shared
    for expert in range(4):
        fill(table, (0, expert))
        fill(table, (1, expert))
    table.credit((0, 0), 9)
    slot = table.slot((0, 1))
    assert fill(table, (0, 7)) == (slot, (0, 1))
    assert all((1, expert) in table.residents() for expert in range(4))


def test_fewer_slots_than_a_token_needs_in_each_layer_are_one_pool():
    table = SlotTable(3, num_layers=2, num_experts=8, k=2, policy="layer-lru")
    assert table.shared
    for key in [(0, 0), (0, 1), (0, 2)]:
        fill(table, key)
    assert fill(table, (1, 5))[1] == (0, 0)


def test_held_protected_and_filling_experts_stay():
    table = SlotTable(4, num_layers=2, num_experts=4, k=2, policy="layer-lru")
    fill(table, (0, 0))
    table.place((0, 1))  # still filling
    table.hold((0, 0))
    assert table.place((0, 2)) is None
    table.release([(0, 0)])
    assert table.place((0, 2), protected={(0, 0)}) is None
    assert table.place((0, 2)) == (table.slot((0, 2)), (0, 0))


def test_first_wins_over_recency():
    table = SlotTable(4, num_layers=1, num_experts=8, k=2, policy="layer-lru")
    for expert in range(4):
        fill(table, (0, expert))
        table.credit((0, expert), expert)
    assert fill(table, (0, 7), first=[(0, 3)])[1] == (0, 3)


def test_a_failed_copy_frees_its_slot():
    table = SlotTable(2, num_layers=1, num_experts=4, k=2, policy="layer-lru")
    slot, _ = table.place((0, 0))
    table.drop((0, 0))
    assert table.slot((0, 0)) is None
    assert table.place((0, 1))[0] == slot


def test_recency_outlives_residency():
    table = SlotTable(2, num_layers=1, num_experts=4, k=2, policy="layer-lru")
    fill(table, (0, 0))
    table.credit((0, 0), 7)
    fill(table, (0, 1))
    fill(table, (0, 2), protected={(0, 1)})  # evicts 0
    fill(table, (0, 0), protected={(0, 2)})  # evicts 1
    assert fill(table, (0, 3))[1] == (0, 2)  # 0 came back with its age


keys = st.tuples(st.integers(0, 2), st.integers(0, 3))
moves = st.lists(st.tuples(st.sampled_from("pfhrdc"), keys), max_size=80)


@pytest.mark.parametrize("policy", ["layer-lru", "global-lru"])
@given(num_slots=st.integers(2, 12), history=moves)
@settings(max_examples=150, deadline=None)
def test_no_history_breaks_the_table(policy, num_slots, history):
    """Slots are never shared, never lost, and what is held or filling never leaves."""
    table = SlotTable(num_slots, num_layers=3, num_experts=4, k=2, policy=policy)
    filling, held, resident = set(), set(), set()
    for clock, (move, key) in enumerate(history):
        if move == "p" and table.slot(key) is None:
            before = held & resident
            placed = table.place(key)
            if placed is not None:
                resident.discard(placed[1])
                assert placed[1] not in before
                filling.add(key)
        elif move == "f" and key in filling:
            table.filled(key)
            filling.discard(key)
            resident.add(key)
        elif move == "h" and table.slot(key) is not None:
            table.hold(key)
            held.add(key)
        elif move == "r":
            table.release([key])
            held.discard(key)
        elif move == "d" and key in filling:
            table.drop(key)
            filling.discard(key)
        elif move == "c":
            table.credit(key, clock)
        living = filling | resident
        slots = {key: table.slot(key) for key in living}
        assert table.residents() == resident
        assert len(set(slots.values())) == len(living) <= num_slots
        assert all(slot is not None and 0 <= slot < num_slots for slot in slots.values())
        if not table.shared:
            per_layer = [sum(key[0] == layer for key in living) for layer in range(3)]
            assert max(per_layer) <= -(-num_slots // 3)


def test_kind_l_o36_captured_steps_take_the_slots_whatever_ctrl_c_left_of_the_table():
    """They do so without a pass of the host's between, which would put it right."""

    def taken(moment):
        table = SlotTable(4, num_layers=2, num_experts=4, k=1, policy="layer-lru")
        for expert in (0, 1):
            fill(table, (0, expert))
        with Interrupt(moment, ("/spmoe_lite/slots.py",)) as strike:
            table.place((0, 2))
            table.filled((0, 2))
            table.drop((0, 2))
        places = dict(table.places(0))
        assert places.keys() == {0, 2} and places[2] == 1, strike.where
        assert places[0] in (None, 0, 2), strike.where
        return strike

    moments = taken(0).seen
    assert moments > 20
    for moment in range(1, moments + 1):
        assert taken(moment).struck
