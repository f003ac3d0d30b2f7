"""Vector environments: one interface (`tether.envs.protocol`) over every way in which simulators are stepped."""
