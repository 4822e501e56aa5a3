"""How well can the length of an answer be predicted at its arrival?"""
