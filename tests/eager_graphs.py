"""Captured steps and drafts without a GPU: what would be captured runs again at every replay, at the same addresses.

Everything is done at once, so a step that was enqueued ahead has ended before the one before it is read:
the hardest order for whatever the two share.
"""

from __future__ import annotations

import contextlib

import torch

from spmoe_lite import draftgraphs, graphs
from spmoe_lite.draftgraphs import DraftSteps
from spmoe_lite.graphs import StepGraphs
from spmoe_lite.hostmap import HostMap
from spmoe_lite.kernels.residency import Tables
from spmoe_lite.predictor import ExpertPredictor


class _Stream:
    """A stream or an event that has nothing to wait for."""

    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def wait_event(self, *_):
        pass

    def wait_stream(self, *_):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0


class _Replay:
    def __init__(self, run, rows, kept):
        self._run, self._rows, self._kept = run, rows, kept

    def replay(self):
        got = self._run(self._rows)
        pairs = zip(got, self._kept, strict=True) if isinstance(got, tuple) else [(got, self._kept)]
        for new, kept in pairs:
            if new is not None:
                kept.copy_(new)


def _capture(run, rows, reset, pool):
    reset()
    with torch.inference_mode():
        kept = run(rows)
    return _Replay(run, rows, kept), kept


def without_gpu(monkeypatch) -> None:
    """Put what graphs take from torch.cuda in place."""
    for module in (graphs, draftgraphs):
        monkeypatch.setattr(module, "capture", _capture)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _Stream)
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())


def capture(engine, critical: int = 2) -> StepGraphs:
    """Give an engine on the CPU, loaded with prefetch=False, captured steps."""
    decoder, store = engine.decoder, engine.decoder.store
    session, config = decoder.session, decoder.target.config
    resident, tables, predictor = {}, None, None
    if store.table.all_fit:
        store.load_all(None, None)
        resident[decoder.target] = store.addresses()
    else:
        store._host = HostMap(engine.target_pack, torch.device("cpu"))
        engine._parts.host_memory = store._host
        host = store.host_addresses()
        share = max(len(store.places(layer)) for layer in range(len(host)))
        slots = torch.zeros((len(host), share), dtype=torch.int64)
        tables = Tables.make(host, slots, (decoder.length.most, len(host), critical))
        predictor = ExpertPredictor(decoder.target, critical)
    if decoder.draft is not None and decoder.draft.source is not None:
        decoder.draft.source.load_all(None, None)
        resident[decoder.draft] = decoder.draft.source.addresses()
    with torch.inference_mode():
        decoder.graphs = StepGraphs(
            decoder.target,
            session.target_kv,
            decoder.draft,
            session.draft_kv,
            resident=resident,
            tables=tables,
            stride=engine.target_pack.expert_layout.stride,
            predictor=predictor if decoder.draft is not None else None,
            most=decoder.length.most,
            num_tokens=engine.num_tokens,
        )
    assert config.num_hidden_layers == len(decoder.target.blocks)
    return decoder.graphs


def capture_drafts(engine, layers: int = 8) -> DraftSteps:
    """Give an engine on the CPU captured drafts; its target stays driven by the host."""
    decoder, store = engine.decoder, engine.decoder.draft.source
    source = None
    if store is not None:
        store.load_all(None, None)
        source = graphs.ResidentExperts(store.addresses())
    prefetcher = decoder.prefetcher
    with torch.inference_mode():
        decoder.drafts = DraftSteps(
            decoder.draft,
            decoder.session.draft_kv,
            source,
            predictor=None if prefetcher is None else prefetcher.predictor,
            layers_ahead=min(layers, len(decoder.target.blocks)),
            most=decoder.length.most,
            num_tokens=engine.num_tokens,
        )
    return decoder.drafts
