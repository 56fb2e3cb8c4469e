"""Data types shared by all packages. Imports no other kvabr package."""
