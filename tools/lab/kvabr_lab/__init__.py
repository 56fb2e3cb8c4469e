"""The laboratory: play whole matrices and report which policy is better, by how much, and why.

A matrix is trace families x deadlines x loads x round trips x engines x assets x policies (`matrix`). Plays are cached
by digest and not repeated (`results_folder`, `digests`). Comparisons are paired over the same plays (`paired`). The
regret of a play, its distance from the clairvoyant, is split into causes (`causes`). Nothing here decides for a player,
and no player imports the laboratory.
"""
