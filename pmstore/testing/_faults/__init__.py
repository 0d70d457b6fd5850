"""System calls that fail, and damage at rest."""
