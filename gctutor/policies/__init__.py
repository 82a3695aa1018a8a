"""Policies: what is kept for backward and what is recomputed, and by which mechanism. `parse` reads their names."""

from gctutor.policies.core import Applied, Mechanism, Policy, PolicyError, Request
from gctutor.policies.grammar import catalogue, concrete, family, parse

__all__ = ["Applied", "Mechanism", "Policy", "PolicyError", "Request", "catalogue", "concrete", "family", "parse"]
