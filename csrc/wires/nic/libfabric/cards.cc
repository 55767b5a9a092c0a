#include "wires/nic/libfabric/cards.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cstdio>
#include <cstring>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <set>

#include "base/env.h"
#include "base/mutex.h"
#include "base/signal_handlers.h"
#include "base/signals.h"
#include "wires/nic/libfabric/enumerate.h"
#include "wires/nic/libfabric/libfabric_nic.h"

namespace mooncake {
namespace {

using Library = std::shared_ptr<const LibfabricLibrary>;

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool isAddress(const std::string& text) {
  std::array<unsigned char, sizeof(in6_addr)> parsed;
  return ::inet_pton(AF_INET, text.c_str(), parsed.data()) == 1 ||
         ::inet_pton(AF_INET6, text.c_str(), parsed.data()) == 1;
}

std::string orEmpty(const char* text) { return text == nullptr ? "" : text; }

std::string pciAddressOf(const fi_info& info) {
  if (info.nic == nullptr || info.nic->bus_attr == nullptr ||
      info.nic->bus_attr->bus_type != FI_BUS_PCI)
    return "";
  const fi_pci_attr& pci = info.nic->bus_attr->attr.pci;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id,
                pci.device_id, pci.function_id);
  return text.data();
}

std::string nameOf(const fi_info& info) {
  if (info.nic != nullptr && info.nic->device_attr != nullptr &&
      info.nic->device_attr->name != nullptr)
    return info.nic->device_attr->name;
  return orEmpty(info.domain_attr->name);
}

// A link-local address is of no use to a peer that may be on another link.
bool isLinkLocal(const fi_info& info) {
  if (info.addr_format != FI_SOCKADDR_IN6 || info.src_addr == nullptr) return false;
  const auto* address = static_cast<const sockaddr_in6*>(info.src_addr);
  return IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr);
}

LibfabricCard describe(const Library& library, const fi_info& info) {
  LibfabricCard card;
  card.name = nameOf(info);
  card.provider = orEmpty(info.fabric_attr->prov_name);
  card.fabric = orEmpty(info.fabric_attr->name);
  card.pciAddress = pciAddressOf(info);
  if (info.nic != nullptr && info.nic->link_attr != nullptr)
    card.bitsPerSecond = info.nic->link_attr->speed;
  card.info =
      FabricInfo(library->dupinfo(&info), [library](fi_info* one) { library->freeinfo(one); });
  return card;
}

// Returns one card per device. An interface has an entry per address. Newer versions of provider
// efa have an entry per interface to the device; "efa-direct" lacks features that we need.
std::vector<LibfabricCard> cardsOf(const Library& library, const fi_info* list,
                                   const std::string& provider) {
  std::vector<LibfabricCard> cards;
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    LibfabricCard card = describe(library, *info);
    const bool isDirect = card.fabric == "efa-direct";
    if (card.provider != provider || isDirect || isLinkLocal(*info)) continue;
    const bool isKnown =
        std::any_of(cards.begin(), cards.end(), [&](const auto& c) { return c.name == card.name; });
    if (!isKnown) cards.push_back(std::move(card));
  }
  return cards;
}

// Returns the cards that were asked for by name or address, in that order. If none was asked for,
// returns all, without loopback if there are other cards.
std::vector<LibfabricCard> filtered(const Library& library, std::vector<LibfabricCard> cards,
                                    const std::string& provider, const FabricEnv& env) {
  std::vector<LibfabricCard> chosen;
  for (const std::string& device : env.devices) {
    if (isAddress(device)) {
      const FabricInfo info = askProvider(library, provider, device, false);
      if (!info) continue;
      chosen.push_back(describe(library, *info));
      chosen.back().name = device;
      continue;
    }
    for (const LibfabricCard& card : cards) {
      if (card.name == device) chosen.push_back(card);
    }
  }
  if (env.devices.empty()) {
    const auto isLoopback = [](const LibfabricCard& card) { return card.name == "lo"; };
    if (!std::all_of(cards.begin(), cards.end(), isLoopback)) std::erase_if(cards, isLoopback);
    chosen = std::move(cards);
  }
  std::erase_if(chosen, [&](const auto& card) { return contains(env.excludedDevices, card.name); });
  return chosen;
}

std::string joined(const auto& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

std::string namesOf(const std::vector<LibfabricCard>& cards) {
  std::vector<std::string> names;
  for (const LibfabricCard& card : cards) names.push_back(card.name);
  return joined(names);
}

std::string providersOf(const Library& library) {
  const FabricInfo all = askProvider(library, "", "", false);
  std::set<std::string> names;
  for (const fi_info* info = all.get(); info != nullptr; info = info->next)
    names.insert(orEmpty(info->fabric_attr->prov_name));
  return joined(names);
}

// Returns the same card with access to GPU memory; null: the provider cannot. A separate query,
// because it starts the GPU's driver. Not for shm, which copies with the processor despite its
// claim (libfabric#12328).
FabricInfo withDeviceMemory(const Library& library, const LibfabricCard& card,
                            const fi_info& info) {
  if (card.provider == "shm") return nullptr;
  const FabricInfo all = askProvider(library, card.provider, "", true);
  for (const fi_info* one = all.get(); one != nullptr; one = one->next) {
    const bool isSame = orEmpty(one->domain_attr->name) == orEmpty(info.domain_attr->name) &&
                        orEmpty(one->fabric_attr->name) == orEmpty(info.fabric_attr->name);
    if (isSame)
      return FabricInfo(library->dupinfo(one), [library](fi_info* it) { library->freeinfo(it); });
  }
  return nullptr;
}

}  // namespace

FabricInfo askProvider(const Library& library, const std::string& provider,
                       const std::string& source, bool deviceMemory) {
  const FabricInfo hints(library->dupinfo(nullptr),
                         [library](fi_info* one) { library->freeinfo(one); });
  if (!hints) return nullptr;
  hints->caps = FI_MSG | FI_RMA | (deviceMemory ? FI_HMEM : 0);
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY |
                                FI_MR_ENDPOINT | (deviceMemory ? FI_MR_HMEM : 0);
  if (!provider.empty()) hints->fabric_attr->prov_name = ::strdup(provider.c_str());
  const char* node = source.empty() ? nullptr : source.c_str();
  const char* service = source.empty() ? nullptr : "0";
  // The first call starts all providers, which change state of the process. So calls run one at a
  // time.
  Guard environment(environmentMutex());
  KeptSignalHandlers kept;
  BlockedSignals blocked;
  fi_info* found = nullptr;
  const auto ask = [&] {
    return library->getinfo(library->api(), node, service, node ? FI_SOURCE : 0, hints.get(),
                            &found);
  };
  // If no provider allows calls from any thread, one is used that is called under our lock.
  if (ask() != 0) {
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    if (ask() != 0) return nullptr;
  }
  return FabricInfo(found, [library](fi_info* one) { library->freeinfo(one); });
}

Result<std::string> describeLibfabric(const FabricEnv& env) {
  auto library = LibfabricLibrary::open(env.libfabricPath);
  if (!library.ok()) return library.error();
  return (*library)->describe() + ", providers " + providersOf(*library);
}

Result<std::vector<LibfabricCard>> listLibfabricCards(const FabricEnv& env) {
  auto library = LibfabricLibrary::open(env.libfabricPath);
  if (!library.ok()) return library.error();
  const std::vector<std::string> providers =
      env.requiredProvider.empty() ? env.providers : std::vector{env.requiredProvider};
  std::string filteredOut;
  for (const std::string& provider : providers) {
    const FabricInfo list = askProvider(*library, provider, "", false);
    std::vector<LibfabricCard> all = cardsOf(*library, list.get(), provider);
    std::vector<LibfabricCard> cards = filtered(*library, all, provider, env);
    if (!cards.empty()) return cards;
    if (!all.empty()) filteredOut += "; provider " + provider + " has " + namesOf(all);
  }
  std::string message = "no network card of provider " + joined(providers);
  if (!env.requiredProvider.empty()) message += ", which " + env.requiredBy + " asks for";
  if (filteredOut.empty()) {
    message += "; " + (*library)->describe() + " offers " + providersOf(*library);
    if (env.requiredProvider.empty())
      message += ", of which MOONCAKE_FABRIC_PROVIDERS names those that may be used";
  } else {
    message += " is called " + joined(env.devices) + filteredOut;
  }
  return Error{ErrorCode::kUnsupported, message};
}

Result<std::unique_ptr<Nic>> openLibfabricNic(const LibfabricCard& card, const FabricEnv& env,
                                              const MemoryPlaces& places) {
  auto library = LibfabricLibrary::open(env.libfabricPath);
  if (!library.ok()) return library.error();
  auto info = std::static_pointer_cast<fi_info>(card.info);
  if (!info) return Error{ErrorCode::kInvalidArgument, "not a card that was listed"};
  if (places.hasDevice()) {
    if (FabricInfo better = withDeviceMemory(*library, card, *info)) info = std::move(better);
  }
  return LibfabricNic::open(*library, std::move(info), card.name, env, places);
}

}  // namespace mooncake
