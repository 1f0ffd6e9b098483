"""What is asked beside the fastest step: cost, cluster size, batch, Pareto front, what-ifs."""
