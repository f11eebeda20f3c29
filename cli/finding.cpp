#include "cli/finding.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <fsdp/error.h>

namespace fsdp {
namespace {

constexpr const char* kVerdicts[] = {"OK", "WARN", "FAIL"};

const char* name_of(Verdict verdict) { return kVerdicts[static_cast<int>(verdict)]; }

}  // namespace

std::string to_text(const Finding& finding) {
  std::string text = fmt::format("{:4} {}: {}", name_of(finding.verdict), finding.id, finding.found);
  if (!finding.why.empty()) text += " -> " + finding.why;
  if (!finding.remedy.empty()) text += " -> " + finding.remedy;
  return text;
}

std::string to_json(const std::vector<Finding>& findings) {
  auto array = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    array.push_back({{"verdict", name_of(finding.verdict)},
                     {"id", finding.id},
                     {"found", finding.found},
                     {"why", finding.why},
                     {"remedy", finding.remedy}});
  }
  return array.dump(2);
}

std::vector<Finding> parse_findings(const std::string& json) {
  std::vector<Finding> findings;
  try {
    for (const auto& item : nlohmann::json::parse(json)) {
      const auto name = std::find(std::begin(kVerdicts), std::end(kVerdicts), item.at("verdict").get<std::string>());
      if (name == std::end(kVerdicts)) throw InvalidArgument("findings: no such verdict");
      findings.push_back({static_cast<Verdict>(name - std::begin(kVerdicts)), item.at("id"), item.at("found"),
                          item.at("why"), item.at("remedy")});
    }
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(std::string("findings: ") + error.what());
  }
  return findings;
}

Verdict worst_of(const std::vector<Finding>& findings) {
  Verdict worst = Verdict::kOk;
  for (const Finding& finding : findings) worst = std::max(worst, finding.verdict);
  return worst;
}

}  // namespace fsdp
