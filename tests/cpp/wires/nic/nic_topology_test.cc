#include <cstdio>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>

#include "wires/nic/topology.h"

namespace mooncake::testing {
namespace {

namespace fs = std::filesystem;

// The sysfs tree of a machine with PCIe switches, with GPUs and cards below each.
class RecordedTree {
 public:
  RecordedTree() {
    std::string pattern = fs::temp_directory_path() / "mooncake-topology-XXXXXX";
    root_ = ::mkdtemp(pattern.data());
  }
  ~RecordedTree() { fs::remove_all(root_); }
  std::string path() const { return root_; }

  void node(int number) { fs::create_directories(root_ / nodeFolder(number)); }
  // `where`: from the root complex to the device, "pci0000:44/0000:44:01.0/...".
  void gpu(const std::string& where, int node) {
    const fs::path at = device(where, node);
    write(at / "vendor", "0x10de");
    write(at / "class", "0x030200");
  }
  void card(const std::string& name, const std::string& where, int node) {
    const fs::path at = device(where, node);
    write(at / "vendor", "0x1d0f");
    write(at / "class", "0x020000");
    const fs::path self = at / "infiniband" / name;
    fs::create_directories(self);
    fs::create_symlink("../..", self / "device");
    fs::create_directories(root_ / "class/infiniband");
    fs::create_symlink(self, root_ / "class/infiniband" / name);
  }

 private:
  static fs::path nodeFolder(int number) {
    return "devices/system/node/node" + std::to_string(number);
  }
  static void write(const fs::path& file, const std::string& text) {
    std::ofstream(file) << text << "\n";
  }
  fs::path device(const std::string& where, int node) {
    const fs::path at = root_ / "devices" / where;
    fs::create_directories(at);
    write(at / "numa_node", std::to_string(node));
    fs::create_directories(root_ / "bus/pci/devices");
    fs::create_symlink(at, root_ / "bus/pci/devices" / at.filename());
    return at;
  }

  fs::path root_;
};

std::string hex(int number) {
  char text[16];
  std::snprintf(text, sizeof(text), "%02x", number);
  return text;
}

// Two nodes with four switches each; below a switch one GPU and `cardsPerGpu` cards. p5en.48xlarge
// and p6-b300.48xlarge have 8 GPUs with 2 cards each, p5.48xlarge has 4 cards each.
struct Machine {
  explicit Machine(int cardsPerGpu, int firstBus) {
    for (int gpu = 0; gpu < 8; ++gpu) {
      const int node = gpu / 4, bus = firstBus + gpu * 8;
      tree.node(node);
      const std::string root = "pci0000:" + hex(node == 0 ? 0x40 : 0x80);
      const std::string down = root + "/0000:" + hex(bus) + ":01.0/0000:" + hex(bus + 1) + ":00.0";
      const auto port = [&](int slot) {
        return down + "/0000:" + hex(bus + 2) + ":" + hex(slot) + ".0";
      };
      for (int card = 0; card < cardsPerGpu; ++card) {
        const std::string name = "rdmap" + std::to_string(bus + 3 + card) + "s0";
        tree.card(name, port(card) + "/0000:" + hex(bus + 3 + card) + ":00.0", node);
        cardsOf[gpu].push_back(name);
        ++cards;
      }
      tree.gpu(port(16) + "/0000:" + hex(bus + 7) + ":00.0", node);
    }
  }
  RecordedTree tree;
  std::map<int, std::vector<std::string>> cardsOf;
  size_t cards = 0;
};

std::vector<std::string> sorted(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return names;
}

void expectNearCards(const Machine& machine) {
  const auto topology = NicTopology::discover({}, machine.tree.path());
  ASSERT_EQ(topology.locations().size(), 10u);
  for (int gpu = 0; gpu < 8; ++gpu) {
    const std::string location = "cuda:" + std::to_string(gpu);
    EXPECT_EQ(sorted(topology.choose(location, NicSelection::kLocal)),
              sorted(machine.cardsOf.at(gpu)));
    const auto all = topology.choose(location, NicSelection::kAll);
    EXPECT_EQ(all.size(), machine.cards);
    const size_t near = machine.cardsOf.at(gpu).size();
    EXPECT_EQ(sorted({all.begin(), all.begin() + static_cast<ptrdiff_t>(near)}),
              sorted(machine.cardsOf.at(gpu)));
  }
  for (int node = 0; node < 2; ++node) {
    std::vector<std::string> expected;
    for (int gpu = 4 * node; gpu < 4 * node + 4; ++gpu)
      expected.insert(expected.end(), machine.cardsOf.at(gpu).begin(),
                      machine.cardsOf.at(gpu).end());
    EXPECT_EQ(sorted(topology.choose("cpu:" + std::to_string(node), NicSelection::kLocal)),
              sorted(expected));
  }
}

TEST(NicTopology, OfAP5en) { expectNearCards(Machine(2, 0x41)); }
TEST(NicTopology, OfAP6B300) { expectNearCards(Machine(2, 0x51)); }
TEST(NicTopology, OfAP5WithFourCardsToAGpu) { expectNearCards(Machine(4, 0x41)); }

TEST(NicTopology, AFlatTreeLeavesTheNode) {
  RecordedTree tree;
  for (int node = 0; node < 2; ++node) {
    tree.node(node);
    const std::string bus =
        "pci0000:" + std::to_string(node) + "0/0000:" + std::to_string(node) + "0:";
    tree.gpu(bus + "01.0", node);
    tree.card("a" + std::to_string(node), bus + "02.0", node);
    tree.card("b" + std::to_string(node), bus + "03.0", node);
  }
  const auto topology = NicTopology::discover({}, tree.path());
  EXPECT_EQ(topology.choose("cuda:1", NicSelection::kLocal),
            (std::vector<std::string>{"a1", "b1"}));
  EXPECT_EQ(topology.choose("cuda:1", NicSelection::kAll),
            (std::vector<std::string>{"a1", "b1", "a0", "b0"}));
}

TEST(NicTopology, OnlyTheCardsThatAreNamed) {
  const Machine machine(2, 0x41);
  const std::string one = machine.cardsOf.at(5).front();
  const auto topology = NicTopology::discover({one}, machine.tree.path());
  EXPECT_EQ(topology.choose("cuda:5", NicSelection::kLocal), std::vector{one});
  EXPECT_EQ(topology.choose("cpu:0", NicSelection::kLocal), std::vector{one});  // the only card
  EXPECT_EQ(topology.choose("cpu:9", NicSelection::kLocal), std::vector{one});
}

TEST(NicTopology, OfThisMachine) {
  const auto topology = NicTopology::discover({"lo", "no such card"});
  ASSERT_TRUE(topology.locations().contains(locationOfThisThread()));
  EXPECT_EQ(topology.choose("cpu:0", NicSelection::kAll).size(), 2u);
}

TEST(NicTopology, JsonThereAndBack) {
  const Machine machine(2, 0x41);
  const auto topology = NicTopology::discover({}, machine.tree.path());
  const auto again = NicTopology::parse(topology.json());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->json(), topology.json());
  const auto spaced = NicTopology::parse("\n{ \"cpu:0\" : [ [ \"a\" , \"b\" ] , [ ] ] }\n");
  ASSERT_TRUE(spaced.ok());
  EXPECT_EQ(spaced->json(), "{\"cpu:0\":[[\"a\",\"b\"],[]]}");
}

TEST(NicTopology, JsonThatIsNoneIsRefusedWhereItEnds) {
  const std::string good = "{\"cpu:0\":[[\"a\"],[\"b\"]]}";
  for (size_t length = 0; length < good.size(); ++length)
    EXPECT_FALSE(NicTopology::parse(good.substr(0, length)).ok()) << length;
  EXPECT_EQ(NicTopology::parse("{\"cpu:0\":\"a\"}").error().message,
            "topology: at byte 9 there is no '['");
  EXPECT_FALSE(NicTopology::parse(good + "x").ok());
  EXPECT_FALSE(NicTopology::parse("{\"a\\\"\":[[],[]]}").ok());
}

TEST(NicTopology, TheFileThatTheVariableNamesWins) {
  const RecordedTree tree;
  FabricEnv env;
  env.topologyPath = tree.path() + "/topology.json";
  EXPECT_FALSE(NicTopology::load(env).ok());
  std::ofstream(env.topologyPath) << "{\"cpu:0\": [[\"mine\"], []]}";
  auto loaded = NicTopology::load(env);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->choose("cpu:0", NicSelection::kAll), std::vector<std::string>{"mine"});
  std::ofstream(env.topologyPath) << "{";
  loaded = NicTopology::load(env);
  ASSERT_FALSE(loaded.ok());
  EXPECT_NE(loaded.error().message.find(env.topologyPath), std::string::npos);
}

}  // namespace
}  // namespace mooncake::testing
