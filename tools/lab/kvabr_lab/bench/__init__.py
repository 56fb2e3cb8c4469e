"""Measurements that anyone can repeat: what codecs cost a real model, how fast they are, and how their peers do.

A bench cuts contexts out of texts, has the model compute their caches once (a work folder keeps them), sends each cache
through every scheme, and compares. Only the commands of kvabr import this package.
"""
