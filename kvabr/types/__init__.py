"""Data types that all packages use. Imports no other kvabr package."""
