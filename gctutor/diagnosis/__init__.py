"""The doctor: does a policy do what its name says, and are the gradients right?"""

from gctutor.diagnosis.examination import STAGES, doctor
from gctutor.diagnosis.inspection import check_checkpoint_kwargs
from gctutor.diagnosis.report import Finding, Report
from gctutor.diagnosis.selective import check_sac_policy, explain

__all__ = ["STAGES", "Finding", "Report", "check_checkpoint_kwargs", "check_sac_policy", "doctor", "explain"]
