"""A program with an example of everything that a figure draws."""

from gspmd.audit import Timeline, hlo, timeline

PROGRAM = """HloModule jit_ring, is_scheduled=true

%body (b: (s32[], u8[90000])) -> (s32[], u8[90000]) {
  %b = (s32[], u8[90000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %v = u8[90000]{0} get-tuple-element(%b), index=1
  %s = (u8[90000]{0}, u8[90000]{0}) collective-permute-start(%v), source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
  %t = (u8[90000]{0}, u8[90000]{0}) collective-permute-start(%v), source_target_pairs={{0,2},{2,4},{4,6},{6,0}}
  %m = u8[90000]{0} negate(%v), metadata={op_name="jit(f)/gspmd[BLE_x -> BLE]/shard_map/step1.einsum/neg" \
source_file="model.py" source_line=7}, backend_config={"window_config":{"estimated_cycles":"1050"}}
  %d = u8[90000]{0} collective-permute-done(%s)
  %e = u8[90000]{0} collective-permute-done(%t)
  ROOT %r = (s32[], u8[90000]{0}) tuple(%i, %d)
}

%condition (c: (s32[], u8[90000])) -> pred[] {
  %c = (s32[], u8[90000]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p: u8[90000]) -> u8[720000] {
  %p = u8[90000]{0} parameter(0)
  %z = s32[] constant(0)
  %k = (u8[90000]{0:S(3)}, u8[90000]{0}, u32[]) copy-start(%p)
  %l = u8[90000]{0:S(3)} copy-done(%k)
  %in = (s32[], u8[90000]{0}) tuple(%z, %l)
  %w = (s32[], u8[90000]{0}) while(%in), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"118"}}
  %o = u8[90000]{0} get-tuple-element(%w), index=1
  ROOT %g = u8[720000]{0} all-gather(%o), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, \
metadata={op_name="jit(f)/gspmd[BLE_xy -> BLE]/shard_map/step1.all-gather.x.y/all_gather"}
}
"""


def drawn() -> Timeline:
    """Return its timeline: a copy, 118 times two permutes over one link beside a computation, and a gather."""
    return timeline(hlo.parse(PROGRAM), "tpu-v4", {"x": 4, "y": 2})
