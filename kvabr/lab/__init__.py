"""The laboratory: plays whole matrices, and says which policy is better, by how much, and why.

A matrix is trace families x deadlines x loads x round trips x engines x assets x policies. What was played once is
kept and not played again (`store`, `digests`); comparisons are paired over the same plays (`paired`); what a play
lacks against the clairvoyant is split into its causes (`causes`). Nothing here decides for a player: the player does
not know that the laboratory exists.
"""
