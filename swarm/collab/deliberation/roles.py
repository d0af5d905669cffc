"""Roles that the members of a consortium may take, so that they do not all look the same way."""

ROLES = {
    "pioneer": "Your part here: look for the most promising way to answer, even an uncommon one, "
    "and carry it through to a definite result.",
    "critic": "Your part here: doubt the answer that comes to mind first. Look for the case in "
    "which it fails, and answer only what stands up to that.",
    "checker": "Your part here: go through every fact, number and step, work each out anew, and "
    "leave out what you cannot support.",
    "teacher": "Your part here: answer so that somebody who is new to the matter can follow each "
    "step, without leaving out what makes it right.",
    "engineer": "Your part here: weigh what can be done, at what cost and with which risks, and "
    "settle for what would work.",
}
"""What each is told; instances take them in this order, and from the first again."""


def role_prompt(role: str) -> str:
    """What a member is told: of a role by its name that, else the words themselves."""
    return ROLES.get(role.strip().lower(), role)
