"""Passes on stand-in weights: what of them is timed, and how a pass and a profile are put together of it."""

from dataclasses import replace

import pytest
import torch

from spmoe_lite import cputime
from spmoe_lite.converters import convert
from spmoe_lite.cputime import Parts, complete, pass_ms
from spmoe_lite.cutoff import Profile
from spmoe_lite.pack import Pack
from spmoe_lite.plan import ModelSize
from spmoe_lite.precision import scheme_of
from spmoe_lite.quant import QuantizedMatrix
from tests import tiny


def size_of(path):
    with Pack.open(path) as pack:
        return ModelSize.of(pack)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = convert(
        tiny.tiny_mixtral(folder / "t", layers=3, experts=8), out=folder / "t.spmoe"
    ).path
    return size_of(target), size_of(tiny.tiny_pack(folder / "d", kind="mistral", layers=3))


def test_a_pass_is_its_layers_their_experts_and_the_head(pair, monkeypatch):
    target, draft = pair
    monkeypatch.setattr(cputime, "_time", lambda model, rows: Parts(0.25 * rows, 0.5, 2.0))
    assert pass_ms(draft, 2) == pytest.approx(1e3 * (3 * 0.5 + 2))
    assert pass_ms(target, 1) == pytest.approx(1e3 * (3 * (0.25 + 2 * 0.5) + 2))
    two_rows = 8 * (1 - 0.75**2)  # of the experts
    assert pass_ms(target, 2) == pytest.approx(1e3 * (3 * (0.5 + two_rows * 0.5) + 2))


def test_a_profile_gets_what_it_lacks_and_keeps_what_it_has(pair, monkeypatch):
    target, draft = pair
    asked = []

    def timed(model, rows):
        asked.append((model.config.is_moe, rows))
        return {(True, 1): 6.0, (True, 5): 15.0, (False, 1): 4.0}[asked[-1]]

    monkeypatch.setattr(cputime, "pass_ms", timed)
    assert complete(None, target, draft, 4) == Profile(0.0, 4.0, 5.0, 2.0, 5)
    assert complete(None, target, None, 4) == Profile(0.0, 0.0, 2.0, 2.0, 1)
    alone = Profile(
        7.0, 0.0, 1.0, 1.0, 1, miss_ratio=0.5
    )  # checking is in proportion to its one row
    assert complete(alone, target, draft, 4) == replace(
        alone, draft_token_ms=4.0, target_layer_ms=2.5, verify_rows=5
    )
    asked.clear()
    whole = Profile(7.0, 3.0, 2.0, 1.0, 5)
    assert complete(whole, target, draft, 4) == whole and complete(alone, target, None, 4) == alone
    assert not asked


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_the_model_itself_runs_over_stand_ins(tmp_path, dtype, monkeypatch):
    pack = tiny.tiny_pack(tmp_path, intermediate=128, experts=dtype, dense=dtype, embed=dtype)
    size = size_of(pack)
    run, seen = cputime.Transformer.run, set()

    def watched(self, ids, kv, start, source, *more):
        qkv = self.blocks[0].qkv
        kind = qkv.scheme if isinstance(qkv, QuantizedMatrix) else qkv.dtype
        seen.add((len(ids), start, source.layout.dtype, kind))
        return run(self, ids, kv, start, source, *more)

    monkeypatch.setattr(cputime.Transformer, "run", watched)
    parts = cputime._time(size, 3)
    assert min(parts.layer, parts.expert, parts.head) > 0
    kind = scheme_of(size.dtypes.linear) or cputime.TORCH_DTYPES[size.dtypes.linear]
    assert seen == {(3, cputime.CONTEXT, size.dtypes.experts, kind)}
    assert size.dtypes.experts.startswith(dtype)


def test_experts_are_lent_in_turn_from_more_memory_than_a_cache_holds(pair, monkeypatch):
    target, _ = pair
    monkeypatch.setattr(cputime, "_pool_bytes", lambda: 5 * target.stride)
    pool = cputime._Pool(target)
    experts = torch.tensor([[6, 2], [1, 6]], dtype=torch.int32)
    found = [next(pool.serve(0, experts)) for _ in range(3)]
    assert [use[:, 0].tolist() for use in found] == [[1, 2]] * 3  # two of them, of three
    addresses = [address for use in found for address in use[:, 1].tolist()]
    assert len(set(addresses[:5])) == 5 and addresses[5] == addresses[0]


def test_the_pool_is_twice_the_cache_within_bounds(monkeypatch):
    least, most = cputime.POOL
    for cache, free, expected in [
        (0, 1 << 40, least),
        (100 << 20, 1 << 40, 200 << 20),
        (1 << 40, 1 << 40, most),
        (100 << 20, 80 << 20, 10 << 20),
    ]:
        monkeypatch.setattr(cputime, "_cache_bytes", lambda cache=cache: cache)
        monkeypatch.setattr(cputime, "available_bytes", lambda device, free=free: free)
        assert cputime._pool_bytes() == expected


def test_the_largest_cache_is_the_last(tmp_path):
    assert cputime._cache_bytes(tmp_path) == 0
    for index, size in enumerate(("48K", "2048K", "307200K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert cputime._cache_bytes(tmp_path) == 300 << 20
    (tmp_path / "index2" / "size").write_text("?")
    assert cputime._cache_bytes(tmp_path) <= 2 << 20


def test_large_layers_are_timed_one_by_one(pair):
    target, draft = pair
    assert cputime._few_layers(target).num_hidden_layers == 3
    wide = replace(draft.config, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    assert cputime._few_layers(replace(draft, config=wide)).num_hidden_layers == 1


def test_what_is_timed_is_no_wild_guess(pair):
    target, _ = pair
    assert 0.01 < pass_ms(target, 1) < 5000
