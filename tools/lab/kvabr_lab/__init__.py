"""The laboratory: plays whole matrices and reports which policy is better, by how much, and why.

A matrix is trace families x deadlines x loads x round trips x engines x assets x policies (`matrix`). Plays are cached
by digest (`results_folder`, `digests`). Policies are compared in pairs over the same plays (`paired`), and their
regret, the distance from the clairvoyant, is split into causes (`causes`). Players never import the laboratory.
"""
