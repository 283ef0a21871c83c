"""Many runs: jobs in processes of their own, sweeps over a grid, studies with a sampler."""
