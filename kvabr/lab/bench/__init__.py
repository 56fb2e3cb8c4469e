"""Measurements that anyone can repeat: what codecs cost a real model, how fast they are, and their peers beside them.

A bench takes texts, cuts contexts out of them, has the model compute their caches once (they are kept in a work
folder), sends each cache through every scheme, and compares. Nothing of kvabr but its commands needs this room.
"""
