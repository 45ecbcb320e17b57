"""Rules of a bucket that obstore does not tell of: whether it removes the parts of uploads that were killed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

from datastates.errors import StorageError
from datastates.storage.location import Location


class Rule(NamedTuple):
    """What a bucket does with the parts of unfinished uploads.

    Attributes:
        is_there: Whether it removes them; None if that is not known.
        text: The rule, or what to do without one.
    """

    is_there: bool | None
    text: str


def of_unfinished_uploads(path: Location) -> Rule:
    """The rule that removes unfinished uploads below a location; raises StorageError."""
    if path.scheme in ("az", "abfs", "abfss"):
        return Rule(True, "Azure removes them after 7 days")
    if path.scheme != "s3":
        return Rule(None, f"not known for {path.scheme}: see whether the bucket has a rule for incomplete uploads")
    if importlib.util.find_spec("boto3") is None:
        return Rule(None, "boto3 would ask the bucket: pip install boto3")
    failures = importlib.import_module("botocore.exceptions")
    _, _, bucket, *names = str(path).split("/", 3)
    try:
        client = importlib.import_module("boto3").client("s3")
        rules = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    except failures.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code != "NoSuchLifecycleConfiguration":
            raise StorageError(0, "ask", str(path), f"ask {path} for its lifecycle rules: {code}") from None
        rules = []
    except failures.BotoCoreError as error:
        raise StorageError(0, "ask", str(path), f"ask {path} for its lifecycle rules: {type(error).__name__}") from None
    for rule in rules:
        days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        filters = rule.get("Filter", {})
        prefix = filters.get("Prefix", filters.get("And", {}).get("Prefix", rule.get("Prefix", "")))
        if days is not None and rule.get("Status") == "Enabled" and f"{''.join(names)}/".startswith(prefix):
            return Rule(True, f"removed {days} days after their begin")
    return Rule(False, "never removed: give the bucket a lifecycle rule with AbortIncompleteMultipartUpload")
