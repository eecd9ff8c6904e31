"""JUnit XML: one test case per finding group and per MTP layer, so that any CI shows it."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from mtpconvert.audit.findings import Severity
from mtpconvert.audit.report.grouping import lines
from mtpconvert.audit.report_model import Report

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def render(report: Report, fail_on: str) -> str:
    suite = Element("testsuite", name="mtpconvert audit")
    failures = skipped = count = 0
    for layer in report.mtp.layers:
        case = SubElement(suite, "testcase", classname="mtp", name=f"MTP layer {layer.layer}")
        count += 1
        unequal = layer.equal is not None and not report.trained and layer.equal < layer.right
        if layer.right < layer.expected or unequal:
            SubElement(case, "failure", message=_xml(layer.sentence), type="mtp-ledger")
            failures += 1
    for line in lines(report.findings):
        found = line.finding
        case = SubElement(suite, "testcase", classname=found.code, name=_xml(found.tensor or found.side))
        count += 1
        if found.waived_by is not None:
            SubElement(case, "skipped", message=_xml(f"waived: {found.waived_by}: {line.message}"))
            skipped += 1
        elif found.severity >= Severity[fail_on.upper()]:
            SubElement(case, "failure", message=_xml(line.message), type=found.code).text = _xml(line.message)
            failures += 1
        else:
            SubElement(case, "system-out").text = _xml(line.message)
    case = SubElement(suite, "testcase", classname="audit", name="something was compared")
    count += 1
    if not report.tensors:
        SubElement(case, "failure", message="nothing was compared", type="nothing-compared")
        failures += 1
    suite.attrib.update(tests=str(count), failures=str(failures), skipped=str(skipped), errors="0")
    root = Element("testsuites")
    root.append(suite)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)
