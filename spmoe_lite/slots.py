"""The slot table: which expert lives in which slot, and which one has to go.

Pure Python, no torch and no threads: every rule is tested without a device. A slot is free, filling (a
copy is on its way) or resident; a held slot serves the layer at hand. Only resident slots that nobody
holds are evicted.

Two scopes. Per layer (the default): every layer owns an equal share of the slots, because a sweep over
the layers is longer than the cache and one global LRU would never hit (DESIGN: simulated 50 % against
0 % at half the slots). Shared: all layers draw from one pool; this is the global LRU, and what is left
when a layer's share would be less than one token's experts.

Recency is the position of the last accepted token that used the expert. It outlives residency, is
written by `credit` alone, and rejected positions never reach it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

ExpertKey = tuple[int, int]  # (layer, expert)
POLICIES = ("layer-lru", "global-lru")


def landing_slots(num_experts: int) -> int:
    """Slots beside those of the table for what passes through in a prompt, of `num_experts` a layer."""
    return max(2, num_experts // 8)


def choose_victim(
    candidates: Iterable[ExpertKey], last_used: Mapping[ExpertKey, int]
) -> ExpertKey | None:
    """The least recently used candidate; never used comes first, equal ages by (layer, expert)."""
    return min(candidates, key=lambda key: (last_used.get(key, -1), key), default=None)


class SlotTable:
    """`num_slots` slots for `num_layers` x `num_experts` experts, of which a token needs `k` a layer."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int, k: int, policy: str):
        every = num_layers * num_experts
        assert policy in POLICIES and min(2, every) <= num_slots <= every
        self.num_slots, self.num_experts = num_slots, num_experts
        self.policy = policy
        self.all_fit = num_slots == every
        self.shared = policy == "global-lru" or num_slots // num_layers < k
        self.last_used: dict[ExpertKey, int] = {}
        self._slot_of: dict[ExpertKey, int] = {}
        self._filling: set[ExpertKey] = set()
        self._held: set[ExpertKey] = set()
        slots = list(range(num_slots))
        self._shares = [slots] if self.shared else [slots[i::num_layers] for i in range(num_layers)]
        self._free = [share[::-1] for share in self._shares]  # taken from the end
        self._resident: list[set[ExpertKey]] = [set() for _ in self._shares]

    def slot(self, key: ExpertKey) -> int | None:
        """Where the expert is, or is going to be; None if nowhere."""
        return self._slot_of.get(key)

    def is_filling(self, key: ExpertKey) -> bool:
        return key in self._filling

    def hold(self, key: ExpertKey) -> None:
        """Keep the expert where it is until `release`."""
        self._held.add(key)

    def release(self, keys: Iterable[ExpertKey]) -> None:
        self._held.difference_update(keys)

    def settle(self, filling: Collection[ExpertKey]) -> None:
        """After a pass that was cut short: nobody holds anything, only `filling` is being copied.

        Ctrl-C can strike between any two changes, so everything is made again from the one rule
        that every method keeps at every moment: what has a slot and is not filling is intact.
        """
        for key in [key for key in self._filling if key not in filling]:
            self._slot_of.pop(key, None)
        self._filling.intersection_update(filling)
        self._held.clear()
        taken = set(self._slot_of.values())
        for pool, share in enumerate(self._shares):
            self._free[pool] = [slot for slot in share[::-1] if slot not in taken]
            self._resident[pool].clear()
        for key in self._slot_of.keys() - self._filling:
            self._resident[self._pool(key[0])].add(key)

    def place(
        self,
        key: ExpertKey,
        *,
        protected: Collection[ExpertKey] = (),
        first: Collection[ExpertKey] = (),
    ) -> tuple[int, ExpertKey | None] | None:
        """Give `key` a slot, marked filling; return (slot, evicted expert or None).

        Takes a free slot, else evicts: from `first` if any of them can go, else the least recently used
        that is neither held nor protected. None if there is no slot to have.
        """
        assert key not in self._slot_of
        pool = self._pool(key[0])
        victim = None
        if not self._free[pool]:
            able = [k for k in self._resident[pool] if k not in self._held]
            victim = choose_victim([k for k in able if k in first], self.last_used)
            if victim is None:
                victim = choose_victim([k for k in able if k not in protected], self.last_used)
            if victim is None:
                return None
            self.drop(victim)
        slot = self._free[pool].pop()
        self._filling.add(key)
        self._slot_of[key] = slot
        return slot, victim

    def num_free(self, layer: int) -> int:
        """Slots that a layer can have without anybody leaving."""
        return len(self._free[self._pool(layer)])

    def filled(self, key: ExpertKey) -> None:
        """The copy of `key` has been made (or is ordered before every later reader)."""
        self._resident[self._pool(key[0])].add(key)
        self._filling.remove(key)

    def drop(self, key: ExpertKey) -> None:
        """Free the slot of `key`: it was evicted, or its copy failed."""
        pool, slot = self._pool(key[0]), self._slot_of.pop(key)
        self._filling.discard(key)
        self._resident[pool].discard(key)
        self._free[pool].append(slot)

    def credit(self, key: ExpertKey, position: int) -> None:
        """An accepted token at `position` used the expert."""
        self.last_used[key] = position

    def places(self, layer: int) -> list[tuple[int, int | None]]:
        """The slots of a layer's own share, and the expert that is intact in each.

        Captured steps ask for them right after a pass that was cut short: one whose slot is gone was leaving.
        """
        assert not self.shared
        expert_in = {self._slot_of.get(key): key[1] for key in self._resident[layer]}
        return [(slot, expert_in.get(slot)) for slot in self._shares[layer]]

    def put(self, residents: Iterable[tuple[int, int, int | None]]) -> None:
        """What is in the slots after somebody else has had them: (slot, layer, expert or None)."""
        self._slot_of = {
            (layer, expert): slot for slot, layer, expert in residents if expert is not None
        }
        self.settle(())

    def residents(self) -> set[ExpertKey]:
        return set().union(*self._resident)

    def filling_in_pool(self, layer: int) -> bool:
        """Whether some slot that `layer` could use is still being filled."""
        return any(self.shared or key[0] == layer for key in self._filling)

    def _pool(self, layer: int) -> int:
        return 0 if self.shared else layer
