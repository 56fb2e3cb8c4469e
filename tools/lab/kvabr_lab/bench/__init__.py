"""Measurements that anyone can repeat: the cost of codecs to a real model, their speed, and the results of their peers.

A bench cuts contexts out of texts, has the model compute their caches once (a work folder keeps them), sends each cache
through every scheme, and compares. Only kvabr's commands import this package.
"""
