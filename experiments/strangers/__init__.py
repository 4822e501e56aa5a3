"""Servers that expose nothing: is the scheduler ever worse than no scheduler?"""
