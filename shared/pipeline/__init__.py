"""Pipeline parallelism by hand: schedules as tables, stages, what travels, one executor."""
