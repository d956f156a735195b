"""The memory plan: sizes as people write them, and refusals whose advice works."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe_lite.config import ModelConfig, Rope
from spmoe_lite.errors import CapacityError, UsageError
from spmoe_lite.manifest import Dtypes
from spmoe_lite.plan import ModelSize, make_plan, parse_size, ram_places
from spmoe_lite.progress import sizes_apart
from spmoe_lite.speed import Costs


@pytest.mark.parametrize(
    "text, size",
    [
        ("20GiB", 20 * 2**30),
        ("8g", 8 * 10**9),
        ("0.29GB", 290_000_000),
        (" 1.5 MB", 1_500_000),
        ("0.5", 500),
        (0.5, 500),
        (np.float32(0.5), 500),
        (np.int64(1), 1),
        ("1", 1000),
        (1, 1),
        ("4096", 4096),
        ("1B", 1),  # a unit is given: no fraction, and nothing to add
        ("512 b", 512),
    ],
)
def test_sizes(text, size):
    assert parse_size(text, 1000) == size


@pytest.mark.parametrize("text", ["", "GB", "1T", "-1GB", "0", 0, -5, "9" * 400, float("nan"), "i"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="--vram"):
        parse_size(text, 1000)


@pytest.mark.parametrize("value", [None, True, [1], b"1GB", 1j])
def test_what_is_not_even_a_number_is_refused(value):
    with pytest.raises(UsageError, match="--pin .*: give a size"):
        parse_size(value, 1000, "--pin")


@pytest.mark.parametrize("value", ["20", 20.0])
def test_a_forgotten_unit_is_asked_for(value):
    with pytest.raises(UsageError, match="20 is 20 bytes: add the unit, as in 20GiB"):
        parse_size(value, 24 * 2**30)


def model(layers, experts, width, longest=8192, dtypes=("fp16", "fp16", "fp16", "fp16")):
    config = ModelConfig(
        family="mixtral" if experts else "mistral",
        vocab_size=1000,
        hidden_size=64 * width,
        intermediate_size=128 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=longest,
        rope=Rope(1e4),
        num_local_experts=experts,
        num_experts_per_tok=min(2, experts),
    )
    dense = dict.fromkeys(dtypes[:3], layers * width * 10**5 // len(set(dtypes[:3])))
    kinds = Dtypes(*dtypes[:3], dtypes[3] if experts else None)
    return ModelSize(config, kinds, dense, 65536 * width if experts else 0)


QUANTISED = ("bf16", "int8-g64", "int4-g64z", "int4-g32")


@given(
    target=st.builds(
        model,
        st.integers(1, 4),
        st.sampled_from([0, 1, 8]),
        st.integers(1, 40),
        dtypes=st.sampled_from([("fp16",) * 4, QUANTISED]),
    ),
    draft=st.none()
    | st.builds(
        model, st.integers(1, 3), st.sampled_from([0, 2]), st.integers(1, 9), st.integers(2, 9000)
    ),
    budget=st.integers(1, 10**8),
    slots=st.none() | st.integers(2, 40),
    context=st.integers(2, 8192),
    more=st.integers(0, 10**8),
    kv_type=st.sampled_from(["auto", "int8"]),
)
@settings(max_examples=300, deadline=None)
def test_kind_i_o26_every_single_advice_of_a_refusal_works(
    target, draft, budget, slots, context, more, kv_type
):
    def plan(**changes):
        asked = {"budget": budget, "slots": slots, "context": context, "draft": draft}
        asked |= {"kv_type": kv_type} | changes
        got = make_plan(
            target,
            asked.pop("draft"),
            device="cpu",
            available=budget + more,
            rows=max(5, min(512, context)),
            costs=Costs(1e9, dict.fromkeys(("fp16", *QUANTISED), 1e10)),
            **asked,
        )
        assert got.total_bytes <= got.budget
        assert got.slots <= got.expert_count
        return got

    try:
        plan()
    except CapacityError as error:
        text = str(error)
        assert "\n" not in text
        changes = [
            changes_of(advice, budget + more) for advice in text.split(": ")[1].split(" or ")
        ]
        if "free " in text:
            assert changes[0] == {}
            return
        for change in changes:
            assert change, text
            plan(**change)
            if list(change) in (["slots"], ["context"]):  # the smallest one
                ((name, value),) = change.items()
                with pytest.raises(CapacityError):
                    plan(**{name: value + 1})
            if list(change) == ["budget"]:  # the smallest one, in whole megabytes
                with pytest.raises(CapacityError):
                    plan(budget=max(1, change["budget"] - 1_000_000))


def changes_of(advice, whole):
    """What to type, as arguments of `make_plan`."""
    change = {}
    for words in advice.split(" and "):
        if found := re.search(r"raise --vram to (\S+GB)", words):
            change["budget"] = parse_size(found[1], whole)
        if found := re.search(r"lower --slots to (\d+)", words):
            change["slots"] = int(found[1])
        if found := re.search(r"lower --ctx-size to (\d+)", words):
            change["context"] = int(found[1])
        if "leave out --draft" in words:
            change["draft"] = None
        if "use --kv-type int8" in words:
            change["kv_type"] = "int8"
    return change


def test_a_refusal_names_two_sizes_that_can_be_told_apart():
    target = model(2, 8, 3)
    needed = plan_of(target, slots=8).total_bytes
    for less in (1, 30_000):
        with pytest.raises(CapacityError) as refused:
            plan_of(target, slots=8, budget=needed - less)
        found = re.findall(r"([0-9.]+) MB (?:are needed|may be used)", str(refused.value))
        assert float(found[0]) > float(found[1])


@pytest.mark.parametrize(
    "sizes, said",
    [
        ((1_240_000, 1_160_000), ("1.24 MB", "1.16 MB")),
        ((24_000_000_001, 24_000_000_000), ("24.000000001 GB", "24.000000000 GB")),
        ((2_000_000, 1_000), ("2.0 MB", "1.0 kB")),
        ((123_400_000, 123_000_000), ("123.4 MB", "123.0 MB")),
        ((7, 7), ("7 bytes", "7 bytes")),
        ((999, 998), ("999 bytes", "998 bytes")),
        (
            (10**30 + 1, 10**30),
            ("1" + "0" * 18 + "." + "0" * 12 + " TB",) * 2,
        ),  # told apart by no float
    ],
)
def test_sizes_that_are_compared_have_the_digits_it_takes(sizes, said):
    assert sizes_apart(*sizes) == said


def test_changes_are_given_together_where_none_is_enough():
    target, draft = model(2, 8, 3), model(2, 0, 3)
    six_less = plan_of(target, slots=8).total_bytes - 6 * target.stride
    with pytest.raises(CapacityError, match="leave out --draft and lower --slots to 2"):
        plan_of(target, draft=draft, slots=8, budget=six_less)


def plan_of(
    target, device="cuda", slots=4, kv_type="auto", draft=None, budget=10**12, pinned="none", **rates
):  # fmt: skip
    rates = dict.fromkeys(("fp16", *QUANTISED), 1e10) | rates
    return make_plan(
        target, draft, device=device, budget=budget, available=budget, slots=slots, context=100,
        rows=8, costs=Costs(1e9, rates, disk_rate=1e8), kv_type=kv_type, pinned=pinned,
    )  # fmt: skip


def test_a_token_takes_the_time_of_each_kind_of_weights():
    target = model(1, 8, 3, dtypes=QUANTISED)
    everything = plan_of(target, slots=8)
    active = 2 * target.stride
    assert everything.token_seconds == pytest.approx((target.dense_bytes + active) / 1e10)
    for dtype, count in [*target.dense.items(), ("int4-g32", active)]:
        slower = plan_of(target, slots=8, **{dtype: 1e9})
        assert slower.token_seconds - everything.token_seconds == pytest.approx(count * 9e-10)
    half = plan_of(target)
    assert half.token_seconds - everything.token_seconds == pytest.approx(active / 2 / 1e9)


def test_quantised_weights_narrow_no_kv_cache_and_take_room_to_dequantise_on_the_cpu():
    floats, quantised = model(2, 4, 3), model(2, 4, 3, dtypes=QUANTISED)
    assert plan_of(floats).kv_bytes == plan_of(quantised).kv_bytes == 2 * 2 * 2 * 16 * 100 * 2
    assert plan_of(floats).workspace_bytes == plan_of(quantised).workspace_bytes
    head = plan_of(quantised, "cpu").workspace_bytes - plan_of(floats, "cpu").workspace_bytes
    assert head == 1000 * 192 * 8


def test_int8_caches_take_a_byte_a_value_and_a_scale_a_row():
    target = model(2, 4, 3)
    coded = plan_of(target, kv_type="int8")
    assert coded.kv_bytes == 2 * 2 * 2 * (16 + 2) * 100
    assert coded.workspace_bytes == plan_of(target).workspace_bytes
    layer = plan_of(target, "cpu", kv_type="int8").workspace_bytes
    layer -= plan_of(target, "cpu").workspace_bytes
    assert layer == 2 * 2 * 16 * 100 * 4  # keys and values of a layer in fp32


@pytest.mark.parametrize(
    "pinned, slots, places",
    [("none", 8, 0), ("all", 8, 16), ("all", 16, 0), (1599, 8, 15), (1600, 8, 16), (99, 8, 0)],
)
def test_ram_holds_all_experts_or_some_or_none(pinned, slots, places):
    assert ram_places(pinned, slots, 16, 100) == places


def test_a_plan_says_what_ram_holds_and_its_token_waits_for_the_disk():
    target = model(2, 8, 3)
    whole, none, few = (plan_of(target, pinned=p) for p in ("all", "none", 8 * target.stride))
    assert (whole.ram_places, none.ram_places, few.ram_places) == (16, 0, 8)
    assert few.has_tier and "8 in RAM" in str(few)
    assert not whole.has_tier and not none.has_tier and "in RAM" not in str(whole)
    assert whole.token_seconds == none.token_seconds
    from_disk = 2 * 2 * (1 - 12 / 16)  # of a token's four experts, those in no slot and no place
    slower = from_disk * target.stride * (1e-8 - 1e-9)
    assert few.token_seconds - whole.token_seconds == pytest.approx(slower)
    assert plan_of(target, pinned=15 * target.stride).token_seconds == whole.token_seconds
