"""A small compiled program, for tests of its pictures and its printed forms."""

HLO = """HloModule jit_train_step, is_scheduled=true, num_partitions=4

ENTRY %main (p: bf16[8,128]) -> bf16[8,512] {
  %p = bf16[8,128]{1,0} parameter(0)
  %n = bf16[8,128]{1,0} negate(%p), backend_config={"window_config":{"estimated_cycles":"1050"}}
  ROOT %g = bf16[8,512]{1,0} all-gather(%n), replica_groups={{0,1,2,3}}, dimensions={1}, channel_id=1
}"""
