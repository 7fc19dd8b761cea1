"""Collectives read from HLO text."""

import pytest

from distrib.engines.hlo import Form, Sent, collectives

PACKED = """HloModule packed, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[1408], q: bf16[784,128], r: pred[3]) -> f32[] {
  %p = f32[1408]{0} parameter(0)
  %q = bf16[784,128]{1,0:T(8,128)(2,1)} parameter(1)
  %r = pred[3]{0} parameter(2)
  %one = (f32[1408]{0}, bf16[784,128]{1,0:T(8,128)}) all-reduce(%p, %q), channel_id=1, to_apply=%add
  %two = f32[1408]{0} all-reduce(%p), channel_id=2, replica_groups={{0,1}}, to_apply=%add
  %three = f32[1408]{0} all-reduce(%p), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  %start = (pred[3]{0}, pred[6]{0}) all-gather-start(%r), channel_id=4, dimensions={0}
  %done = pred[6]{0} all-gather-done(%start)
  ROOT %four = f32[704]{0} reduce-scatter(%p), channel_id=5, dimensions={0}, to_apply=%add
}
"""


def test_each_collective_with_what_a_replica_brings():
    p, q = Form("float32", (1408,), 5632), Form("bfloat16", (784, 128), 200704)
    assert collectives(PACKED) == (
        Sent("all-reduce", (p, q)),
        Sent("all-reduce", (p,), count=2),
        Sent("all-gather", (Form("bool", (3,), 3),)),
        Sent("reduce-scatter", (p,)),
    )
    assert [each.nbytes for each in collectives(PACKED)] == [206336, 11264, 3, 5632]


LOOP = """HloModule m

%inner (i: s32[2]) -> s32[2] {
  %i = s32[2]{0} parameter(0)
  ROOT %moved = s32[2]{0} collective-permute(%i), channel_id=1, source_target_pairs={{0,1}}
}

%body (t: s32[2]) -> s32[2] {
  %t = s32[2]{0} parameter(0)
  ROOT %called = s32[2]{0} call(%t), to_apply=%inner
}

%condition (u: s32[2]) -> pred[] {
  %u = s32[2]{0} parameter(0)
  ROOT %c = pred[] constant(false)
}

ENTRY %main (v: s32[2]) -> s32[2] {
  %v = s32[2]{0} parameter(0)
  %w = s32[2]{0} collective-permute(%v), channel_id=2, source_target_pairs={{0,1}}
  ROOT %loop = s32[2]{0} while(%w), condition=%condition, body=%body
}
"""


def test_what_stands_in_a_loop():
    form = Form("int32", (2,), 8)
    assert collectives(LOOP) == (
        Sent("collective-permute", (form,), in_loop=True),
        Sent("collective-permute", (form,)),
    )


@pytest.mark.parametrize(
    ("hlo", "form"),
    [
        ("f64[]", Form("float64", (), 8)),
        ("c64[2]", Form("complex64", (2,), 16)),
        ("u8[3,0]", Form("uint8", (3, 0), 0)),
        ("s4[3]", Form("int4", (3,), 2)),
        ("f8e4m3fn[5]", Form("float8_e4m3fn", (5,), 5)),
        ("token[]", Form("token", (), 1)),
    ],
)
def test_dtypes(hlo, form):
    text = f"ENTRY %m {{\n %x = {hlo} parameter(0)\n %y = {hlo} all-reduce(%x), channel_id=1\n}}"
    assert collectives(text)[0].forms == (form,)


def test_a_program_without_collectives():
    assert collectives("ENTRY %m {\n %x = f32[] parameter(0)\n}") == ()
