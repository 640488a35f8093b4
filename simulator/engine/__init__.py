"""The device that is simulated: a cost model in place of an accelerator, under the production planner."""
