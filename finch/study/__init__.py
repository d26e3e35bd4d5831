"""Many runs: sweeps, the choice of a rate, and reports. A room: it imports the core and evaluation, and nothing imports it."""
